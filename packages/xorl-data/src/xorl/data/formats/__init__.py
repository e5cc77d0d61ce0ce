"""Formats: each converts the rows of one kind of dataset to documents."""

from xorl.data.formats.chat import ChatFormat, ChatTarget
from xorl.data.formats.completion import COLUMN_SETS, CONTEXT_COLUMNS, CompletionTarget, PromptCompletionFormat
from xorl.data.formats.encoded import EncodedDocuments, Format, Overflow, id_problem
from xorl.data.formats.messages import MESSAGE_COLUMNS, SPLIT_COLUMNS, holds_messages
from xorl.data.formats.preference import PreferenceFormat
from xorl.data.formats.text import TextFormat
from xorl.data.formats.tokenized import TokenizedFormat, as_numpy
from xorl.data.formats.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "COLUMN_SETS",
    "CONTEXT_COLUMNS",
    "MESSAGE_COLUMNS",
    "SPLIT_COLUMNS",
    "ChatFormat",
    "ChatTarget",
    "CompletionTarget",
    "EncodedDocuments",
    "Format",
    "Overflow",
    "PreferenceFormat",
    "PromptCompletionFormat",
    "TextFormat",
    "TextTokenizer",
    "TokenizedFormat",
    "as_numpy",
    "holds_messages",
    "id_problem",
    "load_tokenizer",
]
