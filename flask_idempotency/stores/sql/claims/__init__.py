"""How a key is taken, in three ways that end in the same row. No lock is ever the authority: the row's token is."""
