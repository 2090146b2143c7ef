"""Planning: from recipes to a plan and the decisions about its stages."""
