"""The process and its machine: memory, cores, signals, forks, files, progress."""
