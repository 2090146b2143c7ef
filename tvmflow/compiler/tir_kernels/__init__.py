"""Operators as tensor expressions, for layouts that TVM's own operators do not cover. May import core."""
