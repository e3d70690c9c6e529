"""All three questions about one text: the numbers, and the words made from them."""
