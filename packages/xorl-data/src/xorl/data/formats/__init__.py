"""What the rows of a dataset mean: a Format makes documents of pieces of rows, one file for each kind of data."""

from xorl.data.formats.encoded import OVERFLOWS, EncodedDocuments, Format, Overflow, id_problem
from xorl.data.formats.tokenized import TokenizedFormat, as_numpy

__all__ = [
    "OVERFLOWS",
    "EncodedDocuments",
    "Format",
    "Overflow",
    "TokenizedFormat",
    "as_numpy",
    "id_problem",
]
