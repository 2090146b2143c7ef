"""Where stages run: forked workers that may crash, hang and be stopped without harm to the run."""
