-- Ends a claim with a quota: what claim.lua says, for a key that is absent.

local books = books_of({ ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12] })

if not books then
  return { 'CORRUPT' }
end
return refusal(books) or grant(last_fence, 1, first_seen, true, function()
  admit(books)
end)
