"""Planning: from recipes to a plan and the decisions about its stages.

Imports stages, recipe and all layers below them.
"""
