"""Plans as tables and pages."""
