"""Advice to the driver about unified memory."""

from __future__ import annotations

import re

from pyg_direct.runtime.driver import call, load_driver


def advise(address: int, num_bytes: int, advice: str, index: int, node: int | None = None) -> None:
    """Advise the driver on unified memory: `advice` as in `cudaMemAdvise...`, about GPU `index` or, at -1, the CPU, of
    which it may be one NUMA node.
    """
    driver = load_driver()
    value = getattr(driver.CUmem_advise, "CU_MEM_ADVISE" + re.sub("([A-Z])", r"_\1", advice).upper())
    location = driver.CUmemLocation()
    kinds = driver.CUmemLocationType
    location.type = kinds.CU_MEM_LOCATION_TYPE_HOST if index < 0 else kinds.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = max(index, 0)
    if index < 0 and node is not None:
        location.type, location.id = kinds.CU_MEM_LOCATION_TYPE_HOST_NUMA, node
    name = "cuMemAdvise_v2" if hasattr(driver, "cuMemAdvise_v2") else "cuMemAdvise"
    call(name, address, num_bytes, value, location)
