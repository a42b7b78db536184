// Refreshes the numbers of a page.
