"""All threads and streams, queues, threads that share updates."""
