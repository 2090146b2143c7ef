"""Where stages run: the names that `--executor` takes."""
