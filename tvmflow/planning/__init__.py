"""Planning: plans from recipes, and decisions about which stages must run."""
