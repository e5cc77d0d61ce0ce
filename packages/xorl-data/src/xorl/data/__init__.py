"""xorl.data: formats, packing and a seekable loader for training language models."""

from importlib.metadata import version

from xorl.data.batch import PackedBatch
from xorl.data.documents import split_documents
from xorl.data.entry import DatasetEntry
from xorl.data.errors import DataError, DataFailure
from xorl.data.loader import StepLoader
from xorl.data.packing import pack
from xorl.data.plan import DataPlan
from xorl.data.prepare import PrepareOptions, prepare

__all__ = [
    "DataError",
    "DataFailure",
    "DataPlan",
    "DatasetEntry",
    "PackedBatch",
    "PrepareOptions",
    "StepLoader",
    "__version__",
    "pack",
    "prepare",
    "split_documents",
]

__version__ = version("xorl-data")
