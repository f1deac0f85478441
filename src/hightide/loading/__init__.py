"""Where a model's first values come from: files, read straight into chunks, or its own initialisers."""
