"""xorl.data: formats, packing and a seekable loader for training language models."""

from xorl.data.batch import IGNORE, PackedBatch, padding_batch
from xorl.data.collate import Document, collate
from xorl.data.documents import PreparedDocuments, split_documents
from xorl.data.errors import DataError, DataFailure
from xorl.data.formats import Overflow, TextTokenizer, load_tokenizer
from xorl.data.invariants import special_ids
from xorl.data.loader import Documents, StepLoader
from xorl.data.packing import Bins, PackingMethod, StartMethod, pack
from xorl.data.plan import PAIR_COST, DataPlan, bin_costs, rescale_accumulation, split_step
from xorl.data.prepare import PrepareOptions, prepare
from xorl.data.readers import FileType
from xorl.data.receipt import Counts, DatasetReceipt, Receipt
from xorl.data.sources import DatasetEntry, load_source

__all__ = [
    "IGNORE",
    "PAIR_COST",
    "Bins",
    "Counts",
    "DataError",
    "DataFailure",
    "DataPlan",
    "DatasetEntry",
    "DatasetReceipt",
    "Document",
    "Documents",
    "FileType",
    "Overflow",
    "PackedBatch",
    "PackingMethod",
    "PrepareOptions",
    "PreparedDocuments",
    "Receipt",
    "StartMethod",
    "StepLoader",
    "TextTokenizer",
    "bin_costs",
    "collate",
    "load_source",
    "load_tokenizer",
    "pack",
    "padding_batch",
    "prepare",
    "rescale_accumulation",
    "special_ids",
    "split_documents",
    "split_step",
]
