"""The command line: one module for each command or group of subcommands. May import every other layer.

A command is a function that takes its options and returns the exit code. Its docstring is its help, and
the options are a frozen dataclass whose fields are its arguments. Each module names its commands in a
table `COMMANDS`. `options` builds the parser from them and is the only module in which
`argparse.Namespace` occurs; `arguments` holds the options that several commands share.
"""
