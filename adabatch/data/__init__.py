"""The order of samples and each rank's stream of them.

The order is a pure function of (seed, epoch), and a rank's stream of (start, rank, world). Batch sizes enter only when
a plan takes its share, so the sample count is all that a resumed run needs to know.
"""

from adabatch.data.cache import cache_folder, cached
from adabatch.data.fetch import sample_seed
from adabatch.data.fingerprints import check_fingerprint, fingerprint
from adabatch.data.iterables import IterableAdapter, iterable
from adabatch.data.order import SampleOrder
from adabatch.data.streams import MicroBatch, Stream, stream

__all__ = [
    "IterableAdapter",
    "MicroBatch",
    "SampleOrder",
    "Stream",
    "cache_folder",
    "cached",
    "check_fingerprint",
    "fingerprint",
    "iterable",
    "sample_seed",
    "stream",
]
