"""What dieharder says of the words of each generator: of one key, of split keys and of folded keys."""
