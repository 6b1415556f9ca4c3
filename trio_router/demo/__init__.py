"""`trio-router demo`: a whole fleet and its router in one process, one chat, and a picture of where its time went."""
