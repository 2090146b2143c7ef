"""Pages: reports of runs and releases as self-contained HTML files."""
