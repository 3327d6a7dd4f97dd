"""The grids of the IQ types: which values the indices in a block stand for.

The grids are constants of the file format, written here as text: a character is the number of its place in
`ALPHABET`, and that number holds four base-3 digits or two base-8 digits, lowest first, each an index into
the few levels that the grid's values take.
"""

from functools import cache
from typing import Any

import numpy as np

Grid = np.ndarray[Any, np.dtype[np.int32]]

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+,-./:;<=>?"

IQ1_LEVELS = (-1, 0, 1)
IQ2_LEVELS = (8, 25, 43)
IQ3_XXS_LEVELS = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_LEVELS = (1, 3, 5, 7, 9, 11, 13, 15)

IQ1 = (
    "0020406080A0D0I0K0O0Q0V0b0d0f0n0s0u0y0!0(0-0/0=0?03141A1C1E1G1H1M1S1W1Y1c1e1i1k1m1o1p1w1$1&1)1;10222"
    "6282D2I2K2O2Q2V2b2h2m2q2s2u2y2!2$2(2+2-2/2=2?2A3C3E3M3S3Y3e3i3m3n3$3+3;314344454D4F4H4P4R4V4Z4a4b4d4"
    "e4f4h4j4l4n4p4r4t4$4(4*4,4.4:4;4<4>4C5G5S5U5a5c5e5g5j5k5o5q5w5$5&5+506266686D6I6K6O6Q6V6b6f6n6s6u6y6"
    "!6(6-6/6=6?647A7C7G7L7M7S7a7b7e7k7m7q7$7&7)7+7;708286888D8I8K8O8Q8V8b8h8k8n8s8u8w8y8!8(8-8/8=8?899A9"
    "C9G9L9M9S9U9a9e9g9k9m9n9q9$9&9)9.9;91A3A5A7A9ABADAFAJALAPAVAZAaAbAcAdAeAfAhAjAnAvA%A(A.A:AABCBEBMBRB"
    "WBYBcBeBgBiBmBoBwB$B&B)B;B1C5C7CCCDCFCGCJCNCSCVCWCXCZCbCdCeCfChClCnCpCvCzC#C&C(C*C+C,C.C:C;C>C2D4D8D"
    "ADCDDDEDGDIDKDMDODQDSDUDVDWDbDcDdDeDfDhDiDkDmDnDoDqDsDuDvDwDyD!D#D$D&D(D)D+D,D-D/D;D1E3E4E5EDEEEFEHE"
    "JENERETEUEVEXEZEbEeEfEgEhEkEmEnEpEqErExE!E%E(E:E>EAFEFMFSFUFWFYFaFeFgFiFjFkFmFoFqFwF$F&F;F9GBGDGHGJG"
    "MGTGUGVGXGbGdGeGfGhGiGjGnGrGzG$G%G(G*G.G<G>G7HEHLHNHUHWHYHaHcHeHgHkHoHqHwH$H)H,H0I2I6I8IDIIIKIMIOIQI"
    "VIbIhIkInIsIuIyI!I(I-I/I;I=I?I4JAJCJGJMJTJUJYJeJgJiJkJmJnJoJwJ#J)J+J;J1K6K8KAKDKIKKKOKQKVKbKfKhKnKtK"
    "yK!K$K(K-K/K=K?K4LCLELGLMLULVLWLYLcLeLgLiLoLwL$L&L+L.L;L7MDMJMPMRMVMXMbMdMeMhMlMnMpMzM#M&M(M*M,M.M:M"
    "<M>M4N9NBNGNMNSNYNeNjNkNqNvNxN#N,N0O2O6O8ODOIOKOOOQOVObOdOnOsOuOyO!O-O/O=O?O7PAPCPGPMPWPYPcPePkPmPoP"
    "qPwP#P)P+P:P;P0Q2Q6Q8QIQKQOQQQVQbQfQhQnQsQuQyQ!Q(Q-Q/Q=Q?Q4RARERMRYRcReRgRiRkRmRoR&R+R.R<R0S1S3S5S7S"
    "BSDSESFSHSJSNSPSVSXSZSbSdSeSfShSiSnSpSrStSvSxS#S%S(S-S.S/S4TATCTETMTSTcTeTiTmTqTzT&T;T1UDUGUPUVUXUZU"
    "bUdUeUfUkUlUnUpUrUtUxUzU#U%U(U-U.U>U1V2V4V8VAVCVDVEVGVIVMVQVSVUVVVWVYVaVbVdVeVfVgVhVkVmVnVoVqVuVvVwV"
    "yV$V&V(V)V+V,V;V=V?V1W4W7WCWDWFWHWJWLWPWRWTWVWXWaWbWcWeWfWhWlWnWpWtWwW!W&W(W.W:W<W4XAXDXHXMXTXYXaXeX"
    "gXkXmXoXqXwX$X&X)X+X;X1Y4Y5Y8Y9YCYDYFYJYLYNYRYVYZYbYcYdYeYfYhYjYlYnYoYrYxYzY%Y(Y)Y*Y.Y:Y<Y>YEZUZWZYZ"
    "eZgZiZmZqZ&Z;Z1a3a4a5a7aBaDaHaJaLaPaRaVaXabadaeafahanapaxaza(a*a-a.a<a>a4b6b7b8bAbCbDbEbFbGbIbMbNbOb"
    "QbSbUbVbWbYbabbbcbdbebfbgbhbibkbmbnbobqbubwb$b&b(b)b+b-b;b?b1c5cBcDcHcJcLcTcVcZcbcdcecfchclcncwc#c%c"
    "(c+c,c:c3d4dAdCdDdEdFdGdJdMdOdQdSdUdVdWdYdZdadbdddedfdgdhdidkdldmdndodqdsdyd!d$d&d(d)d+d.d:d;d?d1e2e"
    "3e4e5e7e9eAeBeCeDeEeGeHeJeLeMeNePeReSeTeUeVeWeXeYeaebecedeeefegeheiejekemeneoepeqereteveweze!e#e$e&e"
    "(e)e*e+e.e:e;e<e>e0f1f2f3f5f6f7fAfCfDfFfGfIfJfKfLfMfNfOfPfSfVfWfXfYfZfafbfcfdfefffgfhfifkfmfnfqfufwf"
    "xfyfzf!f$f(f,f/f;f<f=f>f3g4g5g7g9gDgFgJgQgVgXgZgbgdgegfggghgjglgmgngugzg#g%g(g*g.g>g1h2h4h8hAhChDhEh"
    "GhMhShUhVhWhYhahbhchdhehfhghhhihkhmhnhohqhthwhzh$h&h(h)h*h+h;h3i6iDiHiIiMiNiPiViXiYibieifigihilinipi"
    "riti!i%i(i)i*i,i.i4jCjEjGjMjUjajejfjgjijkjmjojqjtj)j;j1k3k5k7kBkDkJkKkNkPkVkYkbkekfkhknkokrkvk!k%k(k"
    ".k<k>kAlElGlRlSlWlelflgljlwl$l)l;lAmBmDmEmHmJmNmPmRmTmVmXmZmbmdmemfmhmimjmlmnmvmwmzm#m%m&m(m)m*m,m.m"
    ":m>m4n6n8nAnDnEnGnUnVnWnYnanbndnenfnhnknmnnnonqnxnzn!n$n(n)n+n,n/n;n<n=n2o7oDoIoNoOoPoRoVoXoZobodoeo"
    "fogoiojonoposouowo!o&o)o*o+o-o:o<o?oEpGpMpSpcpepipkpqpwp$p*p<p1q3q9qDqJqLqNqPqRqSqVqWqXqbqdqeqfqhqjq"
    "nqrquqvq!q(q.q:q;q>qArErFrSrUrYrarergrirmrnrqrxr&r*r,r<r0s2s6s8sIsKsOsQsVsasbsdsfshsnsssusys!s(s-s/s"
    "=s?s4tAtCtEtGtMtStUtYtatctetftgthtmtotqtwtzt&t)t+t;t0u2u6u8uDuIuKuOuQubuduhunusuuuyu!u(u-u/u=u?uCvGv"
    "SvUvbvevivkvmvqv&v+v1w7wBwDwHwNwPwRwSwVwXwbwdwewfwhwiwnwowpwrwtwvwxwzw#w%w(w*w<wAxExGxMxSxUxYxZxaxex"
    "hxixkxoxrxwx$x,x:x0y2y6y8yDyIyKyOyQySyVybydyhynyqysyuyyy!y(y-y/y=y?y4z5zAzCzEzMzSzUzWzYzazczezizkzmz"
    "wz)z+z;z0!2!6!8!D!I!K!O!Q!V!b!d!f!s!u!y!!!(!-!/!=!?!4#A#E#F#G#M#S#W#Y#e#g#i#q#r#w#$#&#)#+#;#1$3$5$7$"
    "9$D$F$H$J$L$N$P$R$V$a$b$d$e$f$h$l$n$v$x$%$($*$.$:$<$>$4%A%C%G%M%U%W%Y%a%c%e%g%o%q%w%&%)%>%1&3&5&9&D&"
    "F&N&R&Z&b&d&e&f&g&h&j&k&l&n&v&x&%&&&(&*&.&>&0(4(6(8(9(A(C(D(E(G(J(M(P(Q(S(U(V(W(Y(a(b(c(d(e(f(g(h(i("
    "k(m(n(o(q(t(w(y($(%(&((()(+(,(-(/(;(=(?(1)3)9)D)G)I)N)P)V)X)Y)b)c)e)f)h)n)p)u)v)z)!)%)&)():)<)>)4*E*"
    "G*M*S*W*a*c*e*f*i*m*n*w*$*)*+*;*3+5+7+9+B+D+F+H+I+J+L+N+R+T+V+X+Z+b+d+e+f+h+l+n+o+r+t+v+#+%+(+,+.+<+"
    "4,D,M,U,W,Y,a,e,g,k,w,$,&,(,),0-2-6-8-D-I-K-O-Q-V-b-d-f-h-s-u-y-!-(---/-=-?-4.7.A.C.E.G.H.W.Y.b.e.g."
    "i.k.m.w.#.%.).+.2/6/8/9/G/K/O/Q/V/b/f/h/n/s/u/y/!/(/-///=/?/G:M:S:U:a:d:e:g:i:k:n:o:p:q:w:5;7;9;B;D;"
    "F;N;P;T;V;b;d;e;f;h;n;r;t;v;w;x;z;%;(;*;4<A<E<H<J<M<U<W<Z<c<e<f<g<j<l<x<#<(<)<+<.<:<<<0=2=6=8=I=K=O="
    "Q=b=d=f=h=s=u=y=!=(=-=/===?=4>C>G>J>M>S>a>e>i>k>o>q>#>)>0?2?6?8?I?K?O?Q?b?d?f?s?u?y?!?(?-?/?=???"
)
IQ2_XXS = (
    "0020406080A0C0I0K0O0Q0S0U0a0g0k0m0s0u0!0/0113191D1R1v1*10222K2u2133393J3L3R3T3X3j3t3v3#3:3042464I4W4"
    "q4s4$47595R5v5:5064666C6O6S6U6a6c6y637R728C8193999J9R9j9v9#9(90A6AIAaAiAsALBVB0C6CICMCYCsCFDlD0EEE1F"
    "3F9FRFtF0G4G-GbH0I2I8IUIkIsIuIPJXJ0K2K1L3L9LRLfL0MSMmM#N6OIO&OUQ1R3R9RFRJRLRRRXRfRjRtRvR#R0SISkSsSwS"
    "1T9TXTfTpT0U6UIUsU+UBVLV0W1X3X9XRXVX0YgYkYuYVZ#Z0a6aAaGaIasaya3bTb:b$c#d%d8e1fdf0gAgGgmgRh6i3j9jRjpj"
    "0kekFljl0m4m9nBnvnTp0s2s8sSsus3tFtRtAu1v3v9vDvRvjv0wWw&w7xRxjx2y3zA!3#9#L#R#.#E$s$V%0&K&U&b(t*I+2-a-"
    "w-7.0/F:a=3>"
)
IQ2_XS = (
    "0020406080A0C0E0G0I0K0M0O0S0U0W0Y0a0c0e0g0k0m0s0u0w0y0$0&0+0-01131517191B1D1F1H1J1L1R1T1V1X1b1d1j1p1"
    "t1v1#102224262A2C2I2S2U2a2e2s2!21333537393B3D3F3J3L3R3T3V3X3b3d3f3j3t3v3#304244464A4C4I4S4U4a4k4s415"
    "3595N5R5T5v50626466686A6C6I6M6S6U6a6g6s6-6?6173797R7t7z708I8O8)8-81939597999B9D9F9J9L9R9T9V9X9b9d9j9"
    "r9t9v9#90A2A4A6AAACAIASAUAaAsA&A)A1B3B5B9BRBjB0C2C4C6CACCCICSCUCYCaCmCsC1D3D9DRD0ECEYE1F3F9FBFRFdFxF"
    "0G4GoGbH>H0I2I4I6I8IAICIIISIUIaIsI-I1J3J9JRJXJnJ0KKKsK=K1L3L9LPLRL0MSMcM+M1NHN<N0O6O8OIOeOyO/OpP#P6Q"
    "IQuQyQ!Q1R3R5R7R9RBRDRFRJRLRRRTRVRXRZRbRdRjRnRtRvR#R0S2S4S6SASCSISSSUSaSsSwS/S1T3T9TBTPTRT0U2U4U6UAU"
    "CUGUIUSUUUaUsU&U1V3V9VLVRV,V0W8WUWaW1X3X9XRXVXdXlX0YAYUYaYqY3Z0a2a4a6aAaCaIaOaSaUaaasa1b3b9bDbRbTb0c"
    "Uc?c1d3d9dJdRdjdtd.d0e6eseyeJfpf.f0gCgSgag+gHhRhThwi1j3j9jRjdjljxj>j0kLlZl%l0mEm9nRnVn:n1prpMq5rdrlr"
    "0s2s4s6sAsCsIsQsSsUsasssus=s?s1t3t5t9tRtbtht0uIusuuu-u=u1v3v9vBvDvRvjvzv0wUw;wFxrx0y6yMyiysyuy=y5zK!"
    "s!y!)!=!1#3#9#R#f#v#0$K$m$f%z%0&4&U&a&g&P(#(%(S)b*<*Y+D,j,0-2-6-8-I-Q---b.h.<.0/2/6/Q/s/-/R:(:n<*<8="
    "I=K=O=-===3>v>x>O?Q?$???"
)
IQ2_S = (
    "0020406080A0C0E0G0I0K0M0O0S0U0W0Y0a0c0e0g0k0m0o0q0s0u0w0y0$0&0-0;0?01131517191B1D1F1J1L1R1T1V1X1b1d1"
    "f1h1j1n1p1t1v1#1%1(1.1:102224262A2C2I2Q2S2U2W2Y2a2e2s2w2!2&2/21333537393B3D3F3J3L3N3P3R3T3V3X3Z3b3d3"
    "f3h3j3l3n3t3v3x3z3#3(3*3.3:30424446484A4C4E4G4I4M4O4S4U4W4Y4a4c4e4g4k4m4s4u4w4y4$4&4-41535557595D5R5"
    "V5X5b5d5j5t5v5#506264666A6C6E6G6I6M6Q6S6U6W6Y6a6c6e6g6k6m6s6w6&6?6173797B7D7F7J7R7V7X7b7d7j7t7#708A8"
    "C8K8O8Q8a8+81939597999B9D9F9J9L9N9R9T9V9X9b9d9f9h9j9l9n9p9t9v9x9#9(9*9.9:90A2A4A6A8AAACAEAGAIAKAMAOA"
    "SAUAWAYAaAcAeAgAkAmAsAuAwAyA$A&A1B3B7B9BDBJBLBRBVBbBdBtBvB#B0C2C4C6CACCCECGCICMCOCSCUCWCYCaCcCeCgCkC"
    "mCsCuCwCyC$C&C-C1D3D5D7D9DBDDDFDJDLDRDTDVDXDbDdDjDtDvD#D0E4E6EAECEIESEUEaEsE?E1F3F5F7F9FDFFFJFRFTFVF"
    "XFbFdFjFtFvF0G2G4G6GAGCGIGSGUGaGqG/G3H9HRHfH0I2I4I6IAICIEIGIIIMIQISIUIaIcIeImIsI!I&I?I1J3J9JBJDJJJRJ"
    "TJVJbJdJjJtJvJ#J0K8KKKOKQKUKaKyK!K=K1L3L5L7L9LDLFLJLLLRLTLVLXLbLdLjLtLvL#L0M4M6MAMCMIMSMUMaMoMsM1N3N"
    "9NRNhN0O4OAOCOSOUOaO!O?O1P3P9P(P8QKQmQyQ!Q1R3R5R7R9RBRDRFRHRJRLRNRRRTRVRXRZRbRdRfRhRjRlRnRtRvR#R(R*R"
    ".R:R0S2S4S6SASCSESGSISKSMSSSUSWSYSaScSeSgSkSmSsSuSwSyS$S&S-S1T3T9TBTDTFTLTRTVTXTbTdTjTtTvT0U2U4U6U8U"
    "AUCUEUGUIUKUMUOUSUUUWUYUaUcUeUgUkUmUsUuUwUyU$U&U-U1V3V5V7V9VBVDVFVJVLVRVTVVVXVbVdVjVrVtVvV#V0W2W4W6W"
    "AWCWIWSWUWaWsW;W1X3X7X9XBXDXFXJXLXRXTXVXXXbXdXjXvX#X0Y2Y4Y6YAYCYIYSYUYaYsY)Y1Z3Z9ZRZ0a2a4a6aAaCaEaGa"
    "IaKaMaOaSaUaWaYaaacaeagakamasauawaya$a&a1b3b5b7b9bBbDbFbJbLbRbTbVbXbbbdbjbtbvb#b0c4c6cAcCcIcScUcacqc"
    "sc1d3d5d7d9dBdDdFdJdLdRdTdVdXdbdddjdtdvd#d0e2e4e6eAeCeIeSeUeaese1f3f9fNfRf0g2g4g6gAgCgIgSgUgagigsg1h"
    "3h9hRh0iGiwi=i1j3j5j9jBjDjFjJjLjRjVjXjbjdjjjvj#j0k2k4k6kAkCkIkSkUkaksk+k3l9lRlfl.l0m4m6mAmCmImSmUmam"
    "sm1n3n9nRnZnpn%n0o&o1p3p9pnp*p0qQqTr.r0s2s4s6sAsCsGsIsMsSsUsascsesgsksssws$s&s1t3t7t9tBtDtFtJtLtRtTt"
    "VtXtbtdtttvt#t>t0u4u8uAuCuSuUuau1v3v5v7v9vBvDvFvJvRvTvVvXvbvdvjvtvvv#v0w2w4w6wAwCwIwSwUwawsw!w1x3x9x"
    "PxRx0y4yAyCySyUyay/y1z3zRznzK!g!i!u!/!1#3#7#9#B#D#F#L#R#T#V#X#b#d#j#t#v###0$4$A$C$S$U$a$i$1%3%9%R%<%"
    "0&2&4&6&A&C&I&S&U&a&s&)&1(3(9(R(*(.(0)W)m)1*3*9*N*R*>*0+Y+c+#,0-4-8-C-K-Q-S-U-a-/-?-R.n.2/8/K/O/Q/u/"
    "y/!/=/1:3:9:R:z:::0;G;b<8=O=/=d>x>6?8?I?K?O?y???"
)
IQ3_XXS = (
    "00204090B0F0G0I0P0Y0x0z0113181A1H1L1O1Q1X1i1u102224292G2I2P2R2V2f2l2z2137383A3L3u3B4V4a4l4x4z41575Q5"
    "g5T6q687C7E7Z7n7183888A8H8J8O8Q8S8d8e8092999G9I91A3A8AAAHAOAwA0B2BGBPBcBsB1C5CeCGDKDcDvD5EIFWF0G2G9G"
    "BGGGIGMGPGYG1H3H5H8HAHHHOHpHtHuH0I2I9IFIGIIIVIWIjI1J8JCJuJyJTKhK3LNLXLyL1N3NENbN1O8OAOHOJOeOrOwO0P2P"
    "GPPPaPcP1Q3Q8QLQgQwQ9RRROSdSwS0T6TITjTCUUUpURVmV4WFWTWVWhWlWyXGYVYWYmYsY7ZbZ4afaqaLbZbub5d8dAdOdAeXe"
    "ue0f6fMfjfCgQgwg2hhh8iJiNiwi2jPjekKlYlKmamcmqmHnnnFoqoOpUpaq5rgrRs3tHt3u5u7u8uQuguMvWvAwbwgw0xDxRxmx"
    "HyXy0z2zKzO!"
)
IQ3_S = (
    "00102050708090A0C0E0G0H0L0R0W0Y0b0d0f0h0m0o0v0y0#0011121418191D1G1J1N1P1T1a1n1r1w10212527282B2E2H2L2"
    "O2S2Y2b2d2f2h2u2x23393D3G3I3P3R3U3a3e3g3t3v3z304B4F4H4K4Q4W4Z4f4u42545G5I5M5R5X5b5d5s5x56696B6P6g6v6"
    "072747G7I7M7R7e7i7081828488898B8D8F8G8I8P8S8U8i8k8n8w80919396989C9H9O9R9X9e9g9u9!90AAADAFAGAKAQAWAZA"
    "jAmAwA1B4B7B8BBBHBNBOBSBXBoBuB3C5CACCCPCRCYCcCeCiC1D8DBDHDODQDfDGEKENEaEcE1F3F8FAFHFTFXFoFuF0G1G3G5G"
    "7G8GAGCGEGHGJGNGOGQGXGZGbGeGgGtGuGxGzG0H2H8HBHFHIHLHPHSHYHfH1I4I7IHIJIOIVIXIhIlIvIyI0J2J5J9JIJKJPJRJ"
    "YJeJsJ1K7KGKJKQKTKXKwKzK4L9LILVLWLhLuL0M2M7MHMjMnM5N9NMNONZNeN2O9OBODOFOIOPOROTOYOaOdOfOpOvO1P3P5PCP"
    "HPJPWPmPwP!P0QAQGQQQSQeQ1R8RCRHRJRNRORXRZRdRjRxR3S9SESISPSgSmSqS1T8TATLTQTaTkTxTEUXU1V3VGVIVTV0W4WAW"
    "GWKWNWQWXWeWuW2X7X9XBXIXOXTXZXfXjX1Y3Y8YDYHYRYWYlYoYuY4Z9ZBZGZIZPZTZ0a2aKaVaWava5b7bHbobBcScmc8dDdOd"
    "Zdfd2e8eCeIeWeaedegeseye1f3f5fAfHfQfwf0g9gJgOgUghg2h7h8hNhahfhrhxh1i4iGiQiciAjMjfjhjYk2l4lIl9mBmDmPm"
    "Rmmm0nGnNnqnAoSoYojooouo0pCpHpWpLqZqoq0r3rSrmr5sWs9tBt0u4u7uGuIuUuWuiuou2v9vKvZvbv1w4w8wEwHwOwfw2xQx"
    "Txhx1y5yByGyeyIzYz2!P!0#"
)


def decode(text: str, levels: tuple[int, ...], digits_per_char: int, values_per_entry: int) -> Grid:
    """The grid that `text` writes: int32 [entries, values_per_entry]."""
    numbers = np.array([ALPHABET.index(char) for char in text])
    places = np.array([len(levels) ** place for place in range(digits_per_char)])
    digits = numbers[:, None] // places % len(levels)
    grid: Grid = np.array(levels, np.int32)[digits].reshape(-1, values_per_entry)
    return grid


@cache
def iq1_grid() -> Grid:
    """IQ1_S and IQ1_M: int32 [2048, 8]."""
    return decode(IQ1, IQ1_LEVELS, 4, 8)


@cache
def iq2_xxs_grid() -> Grid:
    """int32 [256, 8]."""
    return decode(IQ2_XXS, IQ2_LEVELS, 4, 8)


@cache
def iq2_xs_grid() -> Grid:
    """int32 [512, 8]."""
    return decode(IQ2_XS, IQ2_LEVELS, 4, 8)


@cache
def iq2_s_grid() -> Grid:
    """int32 [1024, 8]."""
    return decode(IQ2_S, IQ2_LEVELS, 4, 8)


@cache
def iq3_xxs_grid() -> Grid:
    """int32 [256, 4]."""
    return decode(IQ3_XXS, IQ3_XXS_LEVELS, 2, 4)


@cache
def iq3_s_grid() -> Grid:
    """int32 [512, 4]."""
    return decode(IQ3_S, IQ3_S_LEVELS, 2, 4)
