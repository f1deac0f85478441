"""All threads and streams of the runtime, queues, threads that share updates."""
