"""The commands, each as its options and its help: nothing of what they do is imported."""
