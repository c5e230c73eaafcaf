"""The tests of ranks that go wrong, again and again beside busy processes."""
