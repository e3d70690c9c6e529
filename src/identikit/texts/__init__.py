"""What is read: texts, pairs, images and sounds, their tokens, and files of them."""
