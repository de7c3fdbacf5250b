"""What GPU drivers and process groups offer: devices, placed memory, streams, launches, captured graphs, exchange."""
