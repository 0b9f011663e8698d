"""What connects flashbpt to other libraries. Importing this package changes nothing by itself."""
