"""The `hightide` command. It uses the library only through its public names."""
