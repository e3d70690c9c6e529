"""What every answer is: named arrays over named axes, with where they came from."""
