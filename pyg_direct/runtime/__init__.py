"""What the GPU driver offers: devices, placed memory, streams, kernel launches and captured graphs."""
