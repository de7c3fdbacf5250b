"""Imported by the process that producers are forked from: Numba makes its lock there, and none of them names one."""

from numba.np.ufunc.parallel import _set_init_process_lock

_set_init_process_lock()
