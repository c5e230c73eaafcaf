"""Generated functions that read state from everywhere, of which some is changed between calls."""
