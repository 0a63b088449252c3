"""The environment of a call: traces, transforms, threads, ranks, logs."""
