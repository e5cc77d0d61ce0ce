"""Formats: each turns rows of a dataset into documents; one file for each kind of data."""

from xorl.data.formats.chat import ChatFormat, ChatTarget
from xorl.data.formats.completion import SHAPES, CompletionTarget, PromptCompletionFormat
from xorl.data.formats.encoded import OVERFLOWS, EncodedDocuments, Format, Overflow, id_problem
from xorl.data.formats.recognise import FormatName, recognise
from xorl.data.formats.text import TextFormat
from xorl.data.formats.tokenized import TokenizedFormat, as_numpy
from xorl.data.formats.tokenizer import TextTokenizer, load_tokenizer

__all__ = [
    "OVERFLOWS",
    "SHAPES",
    "ChatFormat",
    "ChatTarget",
    "CompletionTarget",
    "EncodedDocuments",
    "Format",
    "FormatName",
    "Overflow",
    "PromptCompletionFormat",
    "TextFormat",
    "TextTokenizer",
    "TokenizedFormat",
    "as_numpy",
    "id_problem",
    "load_tokenizer",
    "recognise",
]
