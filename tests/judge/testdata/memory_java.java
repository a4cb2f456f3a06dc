import java.util.*;

public class Main {
  public static void main(String[] args) {
    List<byte[]> all = new ArrayList<>();
    while (true) {
      byte[] b = new byte[1 << 20];
      Arrays.fill(b, (byte) 1);
      all.add(b);
    }
  }
}
