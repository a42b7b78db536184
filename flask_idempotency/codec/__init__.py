"""Result ⇄ bytes. Nothing here stores, waits, or knows whose answer it is; nothing here unpickles."""
