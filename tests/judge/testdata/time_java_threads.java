public class Main {
  static volatile long x;
  public static void main(String[] args) throws Exception {
    Thread[] t = new Thread[4];
    for (int i = 0; i < 4; i++) (t[i] = new Thread(() -> { while (true) x++; })).start();
    t[0].join();
  }
}
