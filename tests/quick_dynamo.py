"""Imported, it makes Dynamo compile sooner: it no longer times the guards of each graph, which flushes the caches of
the processor first and takes a quarter of the time of a small graph. Only a log says these times. And Python looks for
garbage less often: what imports and compilers make is mostly kept, and looking through it takes a tenth of their time.
"""

import gc

gc.set_threshold(20000, 20, 20)

from torch._dynamo import guards  # noqa: E402  after garbage is looked for less often

guards.profile_guard_manager = lambda *_: 0.0
