"""xorl.data: formats, packing and a seekable loader for training language models."""

from xorl.data.batch import IGNORE, PackedBatch, padding_batch
from xorl.data.collate import Document, collate
from xorl.data.documents import PreparedDocuments, split_documents
from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError, DataFailure
from xorl.data.formats import Overflow, TextTokenizer, load_tokenizer
from xorl.data.inspect import Stretch, stretches, trained_texts
from xorl.data.invariants import special_ids
from xorl.data.loader import Documents, StepLoader
from xorl.data.packing import Bins, PackingMethod, StartMethod, pack
from xorl.data.plan import PAIR_COST, DataPlan, bin_costs, rescale_accumulation, split_step
from xorl.data.prepare import PrepareOptions, prepare
from xorl.data.readers import FileType
from xorl.data.receipt import Counts, DatasetReceipt, Receipt
from xorl.data.report import html_report, text_report
from xorl.data.sources import load_source
from xorl.data.statistics import dataset_statistics, fill_histogram

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
    "Stretch",
    "TextTokenizer",
    "bin_costs",
    "collate",
    "dataset_statistics",
    "fill_histogram",
    "html_report",
    "load_source",
    "load_tokenizer",
    "pack",
    "padding_batch",
    "prepare",
    "rescale_accumulation",
    "special_ids",
    "split_documents",
    "split_step",
    "stretches",
    "text_report",
    "trained_texts",
]
