-- Ends a claim without a quota: what claim.lua says, for a key that is absent.

return grant(last_fence, 1, first_seen, false)
