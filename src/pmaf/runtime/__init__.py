"""What surrounds a call: traces, transforms, threads, ranks, logs."""
