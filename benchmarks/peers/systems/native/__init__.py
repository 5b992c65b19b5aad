"""3D parallelism out of torch's own parts: DTensor TP, pipelining's 1F1B, fully_shard over dp."""
