-- For the scripts with their includes in place: `run.py check` runs it through tests/lint_lua.py.
-- Redis and Valkey run Lua 5.1. `struct`, `bit`, `cjson`, `cmsgpack`, `os` and `io` differ between servers or are missing on
-- some, so these are all the globals that a script may use.
std = {
  read_globals = {
    'redis', 'KEYS', 'ARGV', 'string', 'math', 'tonumber', 'type', 'ipairs', 'pairs', 'unpack',
  },
}
max_line_length = 128
