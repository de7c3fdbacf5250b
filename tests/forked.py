"""Imported last by the process that others are forked from."""

import gc

from numba.np.ufunc.parallel import _set_init_process_lock

# Numba makes its lock here, and none of the others names one.
_set_init_process_lock()
# What was imported stays shared: collections of garbage would write to it.
gc.freeze()
