// The entries of a tier for types of caches of integers, from cache_type::i16 on.
{round_query<TwoPlanes>, store_planes<2>, attend_integers<16, TwoPlanes>, attend_finish_rotated},
    {round_query<OnePlane>, store_planes<1>, attend_integers<8, OnePlane>, attend_finish_rotated},
    {round_query<OnePlane>, store_packed<4>, attend_integers<4, OnePlane>, attend_finish_rotated},
    {round_query<OnePlane>, store_packed<3>, attend_integers<3, OnePlane>, attend_finish_rotated},
