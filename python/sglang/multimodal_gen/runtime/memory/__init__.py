"""Where weights live: on the device, in host memory until they are used, or spread over ranks."""
