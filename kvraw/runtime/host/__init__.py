"""Host memory: obtained, populated, registered with the driver, handed out in chunks."""
