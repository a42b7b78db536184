-- Ends a claim with a quota: what claim.lua says, for a key that is absent.

local books = books_of({ ARGV[13], ARGV[14], ARGV[15], ARGV[16], ARGV[17] })

if not books then
  return { 'CORRUPT' }
end
return refusal(books) or grant(last_fence, 1, first_seen, true, function()
  admit(books)
end)
