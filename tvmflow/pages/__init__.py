"""Pages: reports of runs and releases as single HTML files that need nothing but a browser."""
