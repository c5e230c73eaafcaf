"""Reports of plans: figures and HTML pages."""
