"""Operations, bytes and seconds of a program, and the choice of pipeline stages by them."""
