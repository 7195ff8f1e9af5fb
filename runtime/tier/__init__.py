"""The tier below a device's memory: host memory, or files of a folder."""
