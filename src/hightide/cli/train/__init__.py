"""`hightide train`: the loop, its settings, its run folder, its saves and how it goes on."""
